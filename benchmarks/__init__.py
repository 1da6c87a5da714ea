"""Programs that take long and print figures, and their tests."""
