from drumline.core.strategies import Zero1Strategy, Zero2Strategy, Zero3Strategy

__all__ = ["Zero1Strategy", "Zero2Strategy", "Zero3Strategy"]
