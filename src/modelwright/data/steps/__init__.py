"""The five stages of cleaning, one file each: format, quality, noise, duplicates and privacy."""
