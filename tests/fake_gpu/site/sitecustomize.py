"""Python loads this at its start, where this folder is on PYTHONPATH: the stand-in's part in Python."""

import os

if "libfakecuda" in os.environ.get("LD_PRELOAD", ""):
    from tests.fake_gpu import startup

    startup.install()
