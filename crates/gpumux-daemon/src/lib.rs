//! gpumuxd: sessions, the scheduling thread, and the API
