"""What bench/run is made of: clock, contenders, figures, report. Python's standard library only."""
