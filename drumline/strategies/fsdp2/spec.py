from drumline.core.strategies import FSDP2Strategy

__all__ = ["FSDP2Strategy"]
