from drumline.core.strategies import LocalSGDStrategy

__all__ = ["LocalSGDStrategy"]
