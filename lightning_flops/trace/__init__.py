"""Trace files of torch.profiler, of CPU or GPU: read into numpy columns once, every table a function of these.

Steps, in all tables, are the profiler's, each extended to the last device event that was launched in it. Times are
whole nanoseconds in here, and microseconds in the reports; what a trace does not contain is None.
"""
