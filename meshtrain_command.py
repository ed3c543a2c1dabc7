"""Where the command `meshtrain` starts: Ctrl-C during its imports, which take seconds, ends it at once and in silence.

It stands outside the package, because importing any part of the package imports jax.
"""

import signal
import sys

if _interruptible := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel's way out; a shell sees 130

from meshtrain import cli

if _interruptible:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on the command line deals with it


def main() -> int:
    """Runs the command line and returns its exit code."""
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
