//! Gangs: a tenant's domains on several devices run and freeze together.
