from drumline.core.strategies import CPStrategy

__all__ = ["CPStrategy"]
