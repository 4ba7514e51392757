"""Text and images from files and programs, as documents."""
