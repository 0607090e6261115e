from drumline.core.strategies import AutoStrategy

__all__ = ["AutoStrategy"]
