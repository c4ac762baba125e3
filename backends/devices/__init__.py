"""Arrays of any library, and the devices that hold their memory."""
