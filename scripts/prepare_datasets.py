"""Tokenise and pack ahead of time: `python scripts/prepare_datasets.py --config C.yaml`, or the YAML alone: `drumline prepare C.yaml`."""

import sys
from pathlib import Path

sys.path.append(sys.path.pop(0))  # this folder shadows nothing
sys.path.append(str(Path(__file__).parent.parent))

from drumline.cli import main

if __name__ == "__main__":
    main(["prepare", *(argument for argument in sys.argv[1:] if argument != "--config")])
