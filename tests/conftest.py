"""What every test finds around it. This folder is on the path: no folder in it may have the name of a package."""

import signal

# A shell's nohup or & may have set these to be ignored, which processes pass on; tests of stopping send them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
