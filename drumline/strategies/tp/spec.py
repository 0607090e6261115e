from drumline.core.strategies import TPStrategy

__all__ = ["TPStrategy"]
