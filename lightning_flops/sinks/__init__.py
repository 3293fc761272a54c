"""Where a report goes: the run's loggers, a file or URL, the package's log, memory. No sink knows a renderer."""
