"""The test suite; it mirrors src one to one."""
