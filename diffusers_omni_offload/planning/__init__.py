"""What a choice of modes takes, predicted before it is made, and which one is the best. Pure: nothing is moved."""
