"""The report: notebooks executed on this host, judged, drawn, and written as offline pages."""
