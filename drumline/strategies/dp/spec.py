from drumline.core.strategies import DPStrategy

__all__ = ["DPStrategy"]
