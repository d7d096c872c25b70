"""What the loader's pure modules do at sizes that no test machine has: orders, costs, and epochs with misfortunes."""
