"""`python -m offload.demo`."""

import sys

from offload.demo.command import main

sys.exit(main())
