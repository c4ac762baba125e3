"""A report of a job that hung, as one page that can be attached to a bug report."""
