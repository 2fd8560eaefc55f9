import sys

from kenpo.cli import main

sys.exit(main())
