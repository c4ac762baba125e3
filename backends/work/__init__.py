"""Work, its states and timing, and the Flight Recorder that keeps them."""
