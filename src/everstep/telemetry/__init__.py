"""What a run says about itself: summary, status, explain, audit, live display. Reads records, commands nothing."""
