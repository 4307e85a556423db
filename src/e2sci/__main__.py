"""`python -m e2sci`."""

from e2sci.cli import main

main(prog_name="e2sci")
