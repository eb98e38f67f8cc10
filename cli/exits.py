"""The exit codes that are not an error of ours."""

EXIT_SOME_FAILED = 1
EXIT_INTERRUPTED = 130
