from drumline.core.strategies import PPStrategy

__all__ = ["PPStrategy"]
