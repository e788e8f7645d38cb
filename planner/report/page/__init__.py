"""The report as a page of HTML: what a page shows, its templates, and what it lets a reader download."""
