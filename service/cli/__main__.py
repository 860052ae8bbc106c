"""`python -m service.cli` is `dss`."""

from service.cli.main import main

main()
