from dtrain.engine.deepspeed.engine import build

__all__ = ["build"]
