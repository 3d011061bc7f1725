"""`python -m kvpeer.cli`, for where the script is not on the PATH (an engine starts its own agent so)."""

import sys

from kvpeer.cli.command import main

sys.exit(main())
