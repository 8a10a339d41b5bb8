"""The critic of a policy."""
