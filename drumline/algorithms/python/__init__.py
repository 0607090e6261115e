"""An objective of the user's own, of any module on any samples."""
