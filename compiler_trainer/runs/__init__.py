"""What is done with a run that there is: going on, measuring, sampling, and handing its weights to others."""
