"""What every test finds around it."""

import signal

# A shell's nohup or & may have set these to be ignored, which processes pass on; tests of stopping send them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
