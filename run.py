"""`python run.py CONFIG.yaml [KEY=VALUE]...`, alone or under any launcher: the same as `drumline train`."""

import sys

sys.path.append(sys.path.pop(0))  # this folder shadows nothing

from drumline.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
