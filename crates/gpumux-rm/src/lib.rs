//! RM ioctl layouts, capture of handles, and the levers
