"""`python -m offload`: the same as the `offload` command."""

import sys

from offload.cli.main import main

sys.exit(main())
