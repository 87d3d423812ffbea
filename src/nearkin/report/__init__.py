"""Report pages, charts, picture sheets and maps of finished runs, and figures of suites."""
