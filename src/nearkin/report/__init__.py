"""Tables, plots and pages: what a person looks at."""
