"""What a job writes by itself when it hangs or fails, with nobody there to look."""
