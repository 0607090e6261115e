from drumline.core.strategies import DDPStrategy

__all__ = ["DDPStrategy"]
