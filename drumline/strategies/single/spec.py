from drumline.core.strategies import SingleStrategy

__all__ = ["SingleStrategy"]
