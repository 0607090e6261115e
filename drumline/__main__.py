"""`python -m drumline` is `drumline`."""

from drumline.cli import main

main()
