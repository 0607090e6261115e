from drumline.core.strategies import DiLoCoStrategy

__all__ = ["DiLoCoStrategy"]
