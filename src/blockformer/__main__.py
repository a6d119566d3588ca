"""`python -m blockformer` is the command line."""

from .cli import main

main()
