"""Reads new weights from a run of Drumline where vLLM runs. It imports nothing of Drumline."""
