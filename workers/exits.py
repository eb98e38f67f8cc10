"""What a worker child's exit code tells its supervisor."""

EXIT_OK = 0
# A fault that a new process may not have: the supervisor starts one.
EXIT_FAILED = 70
# A fault that would come back: the supervisor ends too.
EXIT_CONFIGURATION = 78
