from drumline.core.strategies import ModelParallelStrategy

__all__ = ["ModelParallelStrategy"]
