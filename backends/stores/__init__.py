"""Key-value stores for rendezvous: a shared file, TCP, and a prefix on either."""
