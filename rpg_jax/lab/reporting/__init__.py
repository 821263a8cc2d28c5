"""Reports: from the logs of runs to a comparison, tables, figures and a page."""
